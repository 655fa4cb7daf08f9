"""What can be set in each section: name, kind, default, bounds, and what it does."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Name = Annotated[str, Field(min_length=1)]
_SEEDS = 2**32


class Options(BaseModel):
    """A group of options: frozen, unknown names refused, values taken as YAML writes them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_yaml_writes_it(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = get_args(annotation) or (annotation,)
        if bool in kinds and not isinstance(value, bool):
            raise ValueError("true or false is needed")
        if not {int, float} & set(kinds):
            return value
        if isinstance(value, bool):  # to Python, true is the number 1
            raise ValueError("a number is needed, not true or false")
        # To YAML 1.1, as PyYAML reads it, 1e-5 is text: only 1.0e-5 is a number.
        return _number(value, whole=int in kinds) if isinstance(value, str) else value


def _number(text: str, *, whole: bool) -> Any:
    """The number that a text spells, or the text."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if whole and number.is_integer() else number


class LoraOptions(Options):
    """Low-rank adapters in place of training every weight."""

    rank: int = Field(16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(32.0, gt=0, description="Scale of the adapters; their output is times alpha / rank.")
    targets: Literal["all-linear"] | Annotated[tuple[Name, ...], Field(min_length=1)] = Field(
        "all-linear", description="Layers that get an adapter: all linear ones but the head, or those named."
    )


class ModelOptions(Options):
    """The model, and how it computes."""

    name_or_path: Name = Field(
        ..., description="A hub name, or a folder of `save_pretrained`; `demo:tiny-chat` needs neither."
    )
    torch_dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Dtype of the weights.")
    attn_implementation: Name = Field(
        "sdpa",
        description="Attention: `sdpa`, `eager`, `flash_attention_2`, or another that transformers has.",
    )
    compile: bool = Field(False, description="Compile the model with `torch.compile`.")
    use_liger_kernel: bool = Field(False, description="Use Liger's kernels (CUDA; needs `liger-kernel`).")
    trust_remote_code: bool = Field(False, description="Run code that comes with the model.")
    chat_template: Name | None = Field(
        None, description="A Jinja file that replaces the tokenizer's chat template."
    )
    lora: LoraOptions | None = Field(None, description="Train low-rank adapters instead of all weights.")


class SourceOptions(Options):
    """One of several sources of rows."""

    dataset: Name = Field(..., description="A file, a folder or a hub name, as for `data.dataset`.")
    weight: float = Field(1.0, gt=0, description="Its share of the samples, against the others' weights.")
    mode: Literal["sft", "pretrain"] = Field("sft", description="Conversations, or plain text.")
    split: Name = Field("train", description="Split of a hub data set, or of files named by split.")
    messages_field: Name | None = Field(
        None, description="Field of the messages (or text); null: the usual ones."
    )
    name: Name | None = Field(
        None, description="Name in messages and metrics; null: made of the path or hub name."
    )


class DataOptions(Options):
    """What is trained on, and what is evaluated on."""

    dataset: Name | None = Field(
        None, description="Training data: a file, a folder or a hub name; `demo:chatterbot` needs no hub."
    )
    dataset_split: Name = Field("train", description="Split of `dataset`.")
    messages_field: Name | None = Field(
        None, description="Field of the messages in `dataset` and `eval_dataset`; null: the usual ones."
    )
    max_seq_length: int | None = Field(
        8192, ge=2, description="Tokens of the longest row; longer ones are cut. null: nothing is cut."
    )
    packing: bool = Field(False, description="Put several samples in one row, kept apart.")
    sources: tuple[SourceOptions, ...] = Field(
        (), description="Several sources mixed by weight, instead of `dataset`."
    )
    num_workers: int = Field(0, ge=0, description="Processes that load batches; 0: the training process.")
    eval_dataset: Name | None = Field(None, description="Evaluation data, given like `dataset`.")
    eval_split: Name = Field("validation", description="Split of `eval_dataset`.")
    eval_sources: tuple[SourceOptions, ...] = Field(
        (), description="Several evaluation sources, instead of `eval_dataset`."
    )
    eval_every: int = Field(
        100, ge=1, description="Optimizer steps between two evaluations, where there is data for them."
    )
    eval_samples: int | None = Field(
        None, ge=1, description="Most rows of each evaluation source; null: all."
    )
    last_turn_only: bool = Field(False, description="Train only what comes after the user's last message.")
    train_on_reasoning: bool = Field(True, description="Train the reasoning before an answer as well.")
    include_observations: bool = Field(False, description="Train what tools returned as well.")


class TrainOptions(Options):
    """How long, how fast, and where it is kept."""

    output_dir: Name = Field("./outputs", description="The run folder: record, log and checkpoints.")
    resume_from: Name | None = Field(
        None, description="`auto` for the newest complete checkpoint of `output_dir`, or a checkpoint's path."
    )
    epochs: int = Field(1, ge=1, description="Passes over the data, unless `max_steps` is set.")
    max_steps: int | None = Field(
        None, ge=1, description="Optimizer steps, however many passes that makes; null: by `epochs`."
    )
    per_device_batch_size: int = Field(1, ge=1, description="Rows of a micro-batch on each device.")
    gradient_accumulation_steps: int = Field(16, ge=1, description="Micro-batches of an optimizer step.")
    learning_rate: float = Field(2e-5, gt=0, description="Highest learning rate.")
    min_learning_rate: float = Field(
        0.0, ge=0, description="Learning rate that `cosine` and `linear` end with."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay; norms and biases have none.")
    warmup_ratio: float = Field(
        0.05, ge=0, lt=1, description="Share of the steps in which the learning rate rises to its highest."
    )
    max_grad_norm: float = Field(
        1.0, ge=0, description="Gradients are clipped to this norm; 0: they are not."
    )
    lr_scheduler: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="How the learning rate falls after the warm-up."
    )
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = Field(
        "adamw", description="The optimizer; `adamw_8bit` needs CUDA and `bitsandbytes`."
    )
    save_steps: int = Field(500, ge=1, description="Optimizer steps between two checkpoints.")
    keep_checkpoints: int = Field(2, ge=2, description="Checkpoints that are kept: the newest, and the best.")
    logging_steps: int = Field(1, ge=1, description="Optimizer steps between two rows of metrics.")
    gradient_checkpointing: bool = Field(
        True, description="Compute activations again in the backward pass: less memory, more time."
    )
    seed: int = Field(42, ge=0, lt=_SEEDS, description="Seed of the data order, of adapters and dropout.")


class ParallelOptions(Options):
    """What several processes do with the model; one process needs nothing here."""

    strategy: Literal["ddp", "fsdp2"] = Field(
        "ddp", description="`ddp`: every device holds the model; `fsdp2`: they share it out."
    )


class MemoryOptions(Options):
    """What saves memory without changing a number."""

    chunked_loss: bool = Field(
        True, description="Apply the LM head a chunk at a time, so that no whole logits exist."
    )
    loss_num_chunks: int = Field(8, ge=1, description="Chunks of a micro-batch's loss-bearing positions.")


class PluginOptions(Options):
    """The objective: plain cross-entropy, or at most one of these."""

    deft: bool = Field(False, description="DEFT.")
    dft: bool = Field(False, description="DFT.")
    info_sft: bool = Field(False, description="InfoSFT.")
    info_sft_pbar: float = Field(
        0.93, gt=0, lt=1, description="InfoSFT: probability from which a target has no weight."
    )
    cadft: bool = Field(False, description="CADFT.")
    cadft_beta: float = Field(
        1.0, ge=0, description="CADFT: how fast the weights of hard samples fall; 0 makes it DFT."
    )

    @property
    def chosen(self) -> tuple[str, ...]:
        """Every objective that is switched on; more than one is refused."""
        return tuple(name for name in ("deft", "dft", "info_sft", "cadft") if getattr(self, name))

    @property
    def objective(self) -> Literal["ce", "deft", "dft", "info_sft", "cadft"]:
        """The one objective of the run."""
        return self.chosen[0] if self.chosen else "ce"  # type: ignore[return-value]


class PreprocessOptions(Options):
    """What is done about bad rows."""

    max_bad_rows_pct: float = Field(
        100.0, ge=0, le=100, description="A larger share of bad rows in a source, in percent, is an error."
    )


class LoggingOptions(Options):
    """Trackers, and how often the monitor looks."""

    project: Name = Field("palingenesis", description="Project of the run in every tracker.")
    run_name: Name | None = Field(None, description="Name of the run; null: that of `output_dir`.")
    use_wandb: bool = Field(False, description="Send metrics to wandb.")
    use_trackio: bool = Field(False, description="Send metrics to trackio.")
    use_tensorboard: bool = Field(False, description="Send metrics to TensorBoard.")
    use_mlflow: bool = Field(False, description="Send metrics to MLflow.")
    health_tier2_every: int = Field(
        10, ge=1, description="Steps between two looks at gradient direction, noise and memory."
    )
    health_tier3_every: int = Field(
        100, ge=1, description="Steps between two looks at the weights: stable rank, norms, drift."
    )
    rl_readiness: bool = Field(False, description="Measure the entropy of the model's outputs.")
    rl_entropy_floor: float = Field(
        1.0, ge=0, description="Output entropy, in nats, below which a warning is raised."
    )
    check_every: int = Field(50, ge=1, description="Steps between two checks of every layer for alarms.")
    spike_files: int = Field(
        50, ge=0, description="Most loss spikes whose samples are kept, with text, in `spikes/`; 0: none."
    )
    stop_on: Literal["warning", "critical"] | None = Field(
        None, description="End the run at an event of this severity, or a worse one."
    )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The trackers in use, by name."""
        names = ("wandb", "trackio", "tensorboard", "mlflow")
        return tuple(name for name in names if getattr(self, f"use_{name}"))
