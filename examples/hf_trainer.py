"""The Hugging Face Trainer, watched: python examples/hf_trainer.py"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from palingenesis import load_run
from palingenesis.integrations.transformers import HealthCallback

OUT = "pgs_run_hf_trainer"

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
)
starts = torch.randint(0, 80, (256, 1))
rows = (starts + torch.arange(16)).tolist()  # to learn: counting
arguments = TrainingArguments(
    "trainer_output",
    max_steps=120,
    learning_rate=1e-3,
    logging_steps=20,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
health = HealthCallback(out=OUT, check_every=5, stop_on="critical", overwrite=True)
data = [{"input_ids": row, "labels": row} for row in rows]
Trainer(model, arguments, train_dataset=data, callbacks=[health]).train()

run = load_run(OUT)
print(f"{run.verdict}: {run.verdict_sentence}")
print(f"report: {run.folder / 'report.html'}")
