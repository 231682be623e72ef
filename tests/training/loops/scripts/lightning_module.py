"""Trains a small convolutional network with Lightning: a schedule, clipping, validation, running means of metrics."""

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

PRECISION = "bf16-mixed"  # 32-true, bf16-mixed

CLASSES = 4


class ConvModule(lightning.LightningModule):
    def __init__(self, width=8, lr=0.01):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.GroupNorm(2, width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * 25, CLASSES),
        )
        self.register_buffer("mean_loss", torch.zeros(()))
        self.seen = 0
        self.correct = 0

    def forward(self, image):
        return self.net(image)

    def training_step(self, batch, batch_idx):
        image, target = batch
        logits = self(image)
        loss = F.cross_entropy(logits, target)
        with torch.no_grad():
            self.mean_loss.lerp_(loss.float(), 0.01)
        self.correct += (logits.argmax(1) == target).sum().item()
        self.seen += len(target)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        image, target = batch
        self.log("val_loss", F.cross_entropy(self(image), target))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(CLASSES, (count,), generator=generator)
    image = torch.randn(count, 1, 10, 10, generator=generator)
    image[torch.arange(count), 0, 2 * target] += 2.0
    return DataLoader(TensorDataset(image, target), batch_size=16)


def main():
    lightning.seed_everything(7, verbose=False)
    module = ConvModule()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision=PRECISION,
        max_steps=26,
        gradient_clip_val=1.0,
        accumulate_grad_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, make_data(208, 0), make_data(32, 1))
    print(f"mean loss {module.mean_loss.item():.3f}, accuracy {module.correct / module.seen:.3f}")


if __name__ == "__main__":
    main()
