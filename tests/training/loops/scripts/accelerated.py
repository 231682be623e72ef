"""Trains a small text classifier with accelerate: bfloat16, gradient accumulation, a linear schedule, evaluation."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

PRECISION = "bf16"  # no, bf16

VOCAB, CLASSES, LENGTH = 100, 4, 12
EPOCHS, BATCH_SIZE, ACCUMULATION = 2, 8, 2
LEARNING_RATE = 5e-3


class Classifier(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(dim=1))


def get_dataloaders():
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (448,), generator=generator)
    tokens = torch.randint(VOCAB, (448, LENGTH), generator=generator)
    tokens[:, ::3] = labels[:, None] * 7 + tokens[:, ::3] % 7
    data = TensorDataset(tokens, labels)
    train, test = torch.utils.data.random_split(data, [416, 32], generator=generator)
    return DataLoader(train, batch_size=BATCH_SIZE, shuffle=True), DataLoader(test, batch_size=BATCH_SIZE)


def main():
    accelerator = Accelerator(mixed_precision=PRECISION, gradient_accumulation_steps=ACCUMULATION, cpu=True)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders()

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    steps = EPOCHS * len(train_dataloader) // ACCUMULATION
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / steps))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(EPOCHS):
        model.train()
        total_loss = 0.0
        for tokens, labels in train_dataloader:
            with accelerator.accumulate(model):
                logits = model(tokens)
                loss = F.cross_entropy(logits, labels)
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        correct = 0
        for tokens, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(tokens).argmax(dim=-1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            correct += (predictions == labels).sum().item()
        accuracy = correct / len(eval_dataloader.dataset)
        accelerator.print(f"epoch {epoch}: loss {total_loss.item() / len(train_dataloader):.3f}, {accuracy:.3f}")


if __name__ == "__main__":
    main()
