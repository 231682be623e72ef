"""A GAN with two scalers: legacy tensor types, DataParallel, a prefetcher on its own stream, an average on the CPU."""

import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.utils.data import DataLoader, TensorDataset

cuda = torch.cuda.is_available()
Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor


class Prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.1]).cuda().view(1, 1)
        self.preload()

    def preload(self):
        try:
            (self.next,) = next(self.loader)
        except StopIteration:
            self.next = None
            return
        with torch.cuda.stream(self.stream):
            self.next = self.next.cuda(non_blocking=True).float().sub_(self.mean)

    def get(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.next
        if batch is not None:
            batch.record_stream(torch.cuda.current_stream())
        self.preload()
        return batch


def main():
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    d = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    loss_fn = nn.BCEWithLogitsLoss()
    if cuda:
        g.cuda()
        d.cuda()
        loss_fn.cuda()
    g, d = nn.DataParallel(g), nn.DataParallel(d)
    og, od = (
        torch.optim.Adam(g.parameters(), lr=2e-4, betas=(0.5, 0.999)),
        torch.optim.Adam(d.parameters(), lr=2e-4, betas=(0.5, 0.999)),
    )
    sg, sd = torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")
    data = DataLoader(TensorDataset(torch.randn(256, 16)), batch_size=16, shuffle=True, pin_memory=True)
    ema = {k: v.cpu().clone() for k, v in g.state_dict().items()}
    for epoch in range(3):
        fetch = Prefetcher(data)
        imgs = fetch.get()
        while imgs is not None:
            valid = Variable(Tensor(imgs.size(0), 1).fill_(1.0), requires_grad=False)
            fake = Variable(Tensor(imgs.size(0), 1).fill_(0.0), requires_grad=False)
            real = Variable(imgs.type(Tensor))
            z = Variable(Tensor(torch.randn(imgs.shape[0], 8).tolist()))
            og.zero_grad()
            with torch.autocast("cuda"):
                gen = g(z)
                g_loss = loss_fn(d(gen), valid)
            sg.scale(g_loss).backward()
            sg.step(og)
            sg.update()
            od.zero_grad()
            with torch.autocast("cuda"):
                d_loss = (loss_fn(d(real), valid) + loss_fn(d(gen.detach()), fake)) / 2
            sd.scale(d_loss).backward()
            sd.step(od)
            sd.update()
            with torch.no_grad():
                for k, v in g.state_dict().items():
                    ema[k] = 0.9 * ema[k] + 0.1 * v.cpu()
            imgs = fetch.get()
        print(epoch, g_loss.item(), d_loss.item(), torch.cuda.memory_allocated())
