"""Whose training loop calls the monitor: one callback each for transformers (with TRL) and Lightning.

    from palingenesis.integrations.transformers import HealthCallback    # Trainer, SFTTrainer
    from palingenesis.integrations.lightning import HealthCallback       # Lightning 2

Nothing is imported here, so that neither of the two is needed for the other.
"""
