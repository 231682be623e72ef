"""Waves, spectra, filters."""

import math

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, case, enter, enter_module, wide


@case("overflow", FLOAT16)
def power_spectrum(dtype):
    """|X|^2 of a sine with 1024 samples: X is 500."""
    torch.manual_seed(0)
    wave = torch.sin(torch.arange(1024) * (2 * math.pi * 37 / 1024)) + 0.01 * torch.randn(1024)
    spectrum = torch.fft.rfft(enter(wave, wide(dtype)))
    real, imaginary = spectrum.real.to(dtype), spectrum.imag.to(dtype)
    return (real.square() + imaginary.square() + 1e-2).log()  # lost here


class LogMel(nn.Module):
    def __init__(self, filters):
        super().__init__()
        self.filters = nn.Parameter(filters, requires_grad=False)

    def forward(self, power):
        return torch.log10(power @ self.filters + 1e-10)  # lost here


@case("silent-zero", FLOAT16, parts=(LogMel,))
def log_mel_of_silence(dtype):
    """log10(mel + 1e-10) of padding with zeros, the front end of speech models."""
    torch.manual_seed(0)
    power = torch.rand(6, 40)
    power[4:] = 0.0
    return enter_module(LogMel(torch.rand(40, 8)), dtype)(enter(power, dtype))


@case("collision", LOW)
def time_axis(dtype):
    """sin(2 pi f i / rate) with sample numbers and times in half."""
    time = torch.arange(6000, 6400, dtype=dtype) / 16000  # lost here
    return torch.sin(2 * math.pi * 440 * time)  # lost here


@case("drift", LOW)
def oscillator_phase(dtype):
    """The phase of an oscillator as a cumulative sum of 2 pi f / rate, notes given as integers."""
    note = torch.tensor([57, 60, 64]).repeat_interleave(1500)
    frequency = 440.0 * 2.0 ** ((note.to(dtype) - 69) / 12)
    phase = (frequency * (2 * math.pi / 16000)).cumsum(0)  # lost here
    return torch.sin(phase[-400:])  # lost here


@case("silent-zero", FLOAT16)
def overlap_add_window(dtype):
    """Division by the window's summed squares + 1e-8; a Hann window begins with zero."""
    torch.manual_seed(0)
    window = torch.hann_window(64, dtype=wide(dtype)).to(dtype)
    frame = enter(torch.randn(64), dtype) * window
    return frame * window / (window.square() + 1e-8)  # lost here


@case("overflow", FLOAT16)
def loudness_of_integer_samples(dtype):
    """The mean square of 16-bit samples."""
    torch.manual_seed(0)
    samples = (3000 * torch.randn(4, 800)).short()
    x = samples.to(dtype)
    return 10 * (x * x).mean(-1).log10()  # lost here


@case("overflow", FLOAT16)
def sound_pressure_level(dtype):
    """20 log10(p / 2e-5) of pressures of 3 pascal."""
    torch.manual_seed(0)
    pressure = enter(1 + 2 * torch.rand(16), dtype)
    return 20 * torch.log10(pressure / 2e-5)  # lost here


@case("drift", LOW)
def low_pass_with_slow_pole(dtype):
    """y += 0.001 * (x - y) of a slow envelope."""
    torch.manual_seed(0)
    envelope = torch.zeros(4, dtype=dtype)
    for x in enter(0.5 + 0.02 * torch.rand(3000, 4), dtype):
        envelope = envelope + 0.001 * (x - envelope)  # lost here
    return envelope


@case("drift", LOW)
def biquad_at_low_cutoff(dtype):
    """A resonant filter at 60 Hz of 16 kHz: coefficients near -2 and 1 are rounded."""
    torch.manual_seed(0)
    omega = 2 * math.pi * 60 / 16000
    a1, a2 = torch.tensor([-1.998 * math.cos(omega), 0.998]).to(wide(dtype)).to(dtype)  # lost here
    before, last = torch.zeros(2, dtype=dtype)
    for x in enter(torch.randn(600), dtype):
        before, last = last, 0.01 * x - a1 * last - a2 * before  # lost here
    return torch.stack([before, last])


@case("silent-zero", FLOAT16)
def phase_transform_of_empty_bins(dtype):
    """Cross spectrum over magnitude + 1e-12 with bins that are empty."""
    torch.manual_seed(0)
    cross = torch.randn(2, 65)
    cross[:, 40:] = 0.0
    real, imaginary = enter(cross, dtype)
    magnitude = (real.square() + imaginary.square()).sqrt() + 1e-12  # lost here
    return real / magnitude, imaginary / magnitude  # lost here


@case("cancellation", LOW)
def first_difference_of_loud_offset(dtype):
    """A microphone's offset of 20 is added by the sensor model, then removed by differences."""
    torch.manual_seed(0)
    wave = enter(0.01 * torch.randn(256), dtype) + 20.0  # lost here
    return wave[1:] - wave[:-1]  # lost here


@case("overflow", FLOAT16)
def autocorrelation_of_loud_frame(dtype):
    """Lagged products of samples scaled to 100, summed over 400 samples, as linear prediction needs them."""
    torch.manual_seed(0)
    frame = enter(100 * torch.sin(torch.arange(400) * 0.1) + torch.randn(400), dtype)
    products = torch.stack([(frame[: 400 - lag] * frame[lag:]).sum() for lag in range(1, 5)])  # lost here
    return products / frame.square().sum()  # lost here
