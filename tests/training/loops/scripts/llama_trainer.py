"""Trains a tiny Llama with transformers.Trainer, with a loss of its own, metrics and a callback."""

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

PRECISION = "bfloat16"  # float32, bfloat16

LENGTH = 12


class Sequences(Dataset):
    """Counts modulo a number that differs from sequence to sequence."""

    def __init__(self, count, seed):
        generator = np.random.default_rng(seed)
        periods, starts = generator.integers(3, 30, count), generator.integers(0, 30, count)
        self.rows = [(start + np.arange(LENGTH)) % period + 1 for start, period in zip(starts, periods, strict=True)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = torch.from_numpy(self.rows[index])
        return {"input_ids": row, "labels": row.clone()}


class LossTrainer(Trainer):
    """Adds label smoothing to the loss of the model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].float()
        targets = labels[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits.reshape(-1, 64), targets, label_smoothing=0.05, reduction="sum")
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class WeightNorm(TrainerCallback):
    """Logs the norm of the weights, averaged over the steps."""

    def __init__(self):
        self.total = 0.0
        self.steps = 0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            squares = sum(weight.float().pow(2).sum() for weight in model.parameters())
        self.total += squares.sqrt().item()
        self.steps += 1


def main():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=26,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        max_grad_norm=1.0,
        bf16=PRECISION == "bfloat16",
        use_cpu=True,
        logging_steps=7,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    norms = WeightNorm()
    trainer = LossTrainer(model, arguments, train_dataset=Sequences(256, 0), callbacks=[norms])
    result = trainer.train()
    print(f"loss {result.training_loss:.3f}, mean norm of the weights {norms.total / norms.steps:.3f}")


if __name__ == "__main__":
    main()
