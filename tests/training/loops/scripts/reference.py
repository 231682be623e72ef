"""Trains a small classifier in the manner of reference scripts: meters, EMA, warm-up, gradient scaler, evaluation."""

from collections import defaultdict, deque
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

PRECISION = "float16"  # float32, bfloat16, float16

OUTPUT_DIR = Path("out")
EPOCHS, BATCH_SIZE, CLASSES = 3, 32, 4
LR, WARMUP_STEPS = 0.05, 6
EMA_DECAY = 0.999

low = None if PRECISION == "float32" else getattr(torch, PRECISION)


class SmoothedValue:
    """A series of values: the median of a window, and the average of the whole series."""

    def __init__(self, window_size=20):
        self.deque = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, n=1, **values):
        for name, value in values.items():
            self.meters[name].update(value, n)

    def __str__(self):
        return "  ".join(f"{name}: {m.median:.3f} ({m.global_avg:.3f})" for name, m in self.meters.items())


class ConvNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(2 * width, CLASSES)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


def accuracy(output, target):
    with torch.inference_mode():
        correct = output.argmax(1).eq(target)
        return correct.float().mean().item() * 100.0


def generate(count, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(CLASSES, (count,), generator=generator)
    image = torch.randn(count, 3, 12, 12, generator=generator)
    image[:, 0] += 1.5 * target[:, None, None] / CLASSES
    return TensorDataset(image, target)


def train_one_epoch(model, criterion, optimizer, data_loader, model_ema, scaler, lr_scheduler):
    model.train()
    metric_logger = MetricLogger()
    for image, target in data_loader:
        with torch.autocast("cpu", dtype=low, enabled=low is not None):
            output = model(image)
            loss = criterion(output, target)

        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < scale
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            skipped = False
        if not skipped:
            lr_scheduler.step()
        model_ema.update_parameters(model)

        acc1 = accuracy(output, target)
        metric_logger.update(loss=loss.item(), acc1=acc1, n=image.shape[0])
    return metric_logger


def evaluate(model, criterion, data_loader):
    model.eval()
    metric_logger = MetricLogger()
    with torch.inference_mode():
        for image, target in data_loader:
            with torch.autocast("cpu", dtype=low, enabled=low is not None):
                output = model(image)
                loss = criterion(output, target)
            metric_logger.update(loss=loss.item(), acc1=accuracy(output, target), n=image.shape[0])
    return metric_logger


def main():
    torch.manual_seed(0)
    OUTPUT_DIR.mkdir(exist_ok=True)
    data_loader = DataLoader(generate(288, 0), batch_size=BATCH_SIZE, shuffle=True)
    data_loader_test = DataLoader(generate(32, 1), batch_size=BATCH_SIZE)

    model = ConvNet()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20) if PRECISION == "float16" else None
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=WARMUP_STEPS)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(data_loader) - WARMUP_STEPS)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[WARMUP_STEPS])
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY), use_buffers=True)

    for epoch in range(EPOCHS):
        trained = train_one_epoch(model, criterion, optimizer, data_loader, model_ema, scaler, lr_scheduler)
        tested = evaluate(model, criterion, data_loader_test)
        print(f"Epoch {epoch}: {trained}")
        print(f"Test: {tested}")
        checkpoint = {
            "model": model.state_dict(),
            "model_ema": model_ema.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "epoch": epoch,
        }
        torch.save(checkpoint, OUTPUT_DIR / "checkpoint.pth")


if __name__ == "__main__":
    main()
