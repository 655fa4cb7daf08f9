"""Supervised fine-tuning with TRL, watched: python examples/trl_sft.py"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from palingenesis import load_run
from palingenesis.integrations.transformers import HealthCallback

OUT = "pgs_run_trl_sft"
texts = [f"{a} plus {b} is {a + b}" for a in range(16) for b in range(16)]

bpe = Tokenizer(models.BPE(unk_token="<unk>"))
bpe.pre_tokenizer = pre_tokenizers.Whitespace()
bpe.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=["<unk>", "<pad>", "</s>"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")
torch.manual_seed(0)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size))
arguments = SFTConfig(
    "trainer_output", max_steps=120, learning_rate=1e-3, logging_steps=20, save_strategy="no",
    report_to="none", use_cpu=True, bf16=False,
)  # fmt: skip
health = HealthCallback(out=OUT, check_every=5, stop_on="critical", overwrite=True)
data = Dataset.from_dict({"text": texts})
SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[health]).train()

run = load_run(OUT)
print(f"{run.verdict}: {run.verdict_sentence}")
print(f"report: {run.folder / 'report.html'}")
