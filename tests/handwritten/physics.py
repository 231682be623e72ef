"""Energies, integrators, fields."""

import torch
from torch import nn

from handwritten.case import FLOAT16, LOW, case, enter, enter_module, wide


class AtomisticModel(nn.Module):
    """A learned correction is added to the energies of free atoms, as interatomic potentials do."""

    def __init__(self):
        super().__init__()
        self.correction = nn.Linear(8, 1)
        self.reference = nn.Parameter(torch.full((12,), -75.0))

    def forward(self, features):
        return (self.correction(features).squeeze(-1) * 0.01 + self.reference).sum(-1)  # lost here


@case("absorption", LOW, parts=(AtomisticModel,))
def energy_difference(dtype):
    """The energy difference of two conformers whose atoms sum to -900."""
    torch.manual_seed(0)
    model = enter_module(AtomisticModel(), dtype)
    first, second = model(enter(torch.randn(6, 12, 8), dtype)), model(enter(torch.randn(6, 12, 8), dtype))
    return first - second  # lost here


@case("absorption", LOW)
def euler_steps(dtype):
    """x += v * dt where x is 50 and the step is 1e-3."""
    torch.manual_seed(0)
    position, velocity = enter(50 + torch.rand(8), dtype), enter(1 + torch.rand(8), dtype)
    start = position.clone()
    for _ in range(1000):
        position = position + velocity * 1e-3  # lost here
    return position - start  # lost here


@case("overflow", FLOAT16)
def softened_gravity(dtype):
    """1 / (r^2 + eps^2)^1.5 at distances of 60: the cube is inf, the force zero."""
    torch.manual_seed(0)
    difference = enter(40 * torch.randn(16, 3), dtype)
    squares = difference.square().sum(-1, keepdim=True) + 0.01
    return difference / squares**1.5  # lost here


@case("silent-zero", FLOAT16)
def partition_function(dtype):
    """-log(sum(exp(-E))) of energies of 40 kT."""
    torch.manual_seed(0)
    energy = enter(40 + 2 * torch.randn(4, 64), dtype)
    return -torch.log(torch.exp(-energy).sum(-1))  # lost here


@case("drift", LOW)
def clock_of_an_integrator(dtype):
    """t += 0.0019 stops at 4, or at 0.5."""
    time = torch.zeros((), dtype=dtype)
    for _ in range(2600):
        time += 0.0019  # lost here
    return time


@case("silent-zero", FLOAT16)
def boltzmann_factor_in_si(dtype):
    """Energies of 1e-21 J over kT: numerator and denominator are zero."""
    torch.manual_seed(0)
    energy = enter(1e-21 * (1 + torch.rand(16)), wide(dtype)).to(dtype)  # lost here
    temperature = torch.tensor(1.38e-23 * 300, dtype=wide(dtype)).to(dtype)  # lost here
    return torch.exp(-energy / temperature)


@case("overflow", FLOAT16)
def lennard_jones(dtype):
    """(sigma / r)^12 of atoms that come too close."""
    torch.manual_seed(0)
    ratio = 1 / enter(0.33 + 0.3 * torch.rand(32), dtype)
    return 4 * (ratio**12 - ratio**6)  # lost here


@case("cancellation", LOW)
def second_derivative_by_differences(dtype):
    """(u[i+1] - 2 u[i] + u[i-1]) / h^2 of a sine with h = 0.02."""
    u = torch.sin(torch.arange(120, dtype=dtype) * 0.02)  # lost here
    return (u[2:] - 2 * u[1:-1] + u[:-2]) / 0.02**2  # lost here


@case("absorption", LOW)
def heat_equation(dtype):
    """Temperatures of 300 K change by 0.02 per step."""
    torch.manual_seed(0)
    bump = 8 * torch.exp(-((torch.arange(64) - 32) / 8.0).square())
    start = 300 + enter(bump, dtype)  # lost here
    field = start
    for _ in range(200):
        field = field + 0.2 * (field.roll(1) - 2 * field + field.roll(-1))  # lost here
    return field - start  # lost here


@case("cancellation", LOW)
def kinetic_energy_of_slow_particles(dtype):
    """(1 / sqrt(1 - v^2) - 1) at v = 0.01."""
    torch.manual_seed(0)
    velocity = enter(0.01 + 0.003 * torch.rand(16), dtype)
    gamma = 1 / torch.sqrt(1 - velocity.square())  # lost here
    return (gamma - 1) * 1e4  # lost here


@case("drift", LOW)
def damped_oscillator(dtype):
    """A friction of 2e-4 per step is rounded away: the oscillator does not lose its energy."""
    x, v = torch.tensor(1.0, dtype=dtype), torch.tensor(0.0, dtype=dtype)
    for _ in range(2500):
        v = (v - 0.05 * x) * (1 - 2e-4)  # lost here
        x = x + 0.05 * v  # lost here
    return x * x + v * v


@case("flush", FLOAT16)
def coulomb_of_small_charges(dtype):
    """Charges of 1e-4 in the units of the network: their products vanish, the large constant comes too late."""
    torch.manual_seed(0)
    charge = enter(1e-4 * torch.rand(8), dtype)
    distance = enter(1 + torch.rand(8, 8), dtype)
    return charge[:, None] * charge[None, :] / distance * 14.4e6  # lost here


@case("cancellation", LOW)
def virial_of_periodic_cell(dtype):
    """Minimum image: x - L * round(x / L) of unwrapped coordinates after many crossings."""
    torch.manual_seed(0)
    inside = enter(torch.rand(64) - 0.5, dtype)
    crossings = torch.randint(300, 400, (64,)).to(dtype)  # lost here
    unwrapped = inside * 8 + crossings * 10  # lost here
    return unwrapped - 10 * torch.round(unwrapped / 10)  # lost here


@case("cancellation", LOW)
def divergence_of_flow(dtype):
    """du/dx + dv/dy of a nearly incompressible flow of 30 m/s on a grid of 0.1 m."""
    torch.manual_seed(0)
    ripple = enter(0.02 * torch.randn(2, 16, 16), dtype)
    velocity = 30.0 + ripple  # lost here
    du = (velocity[0, 1:, :-1] - velocity[0, :-1, :-1]) / 0.1  # lost here
    dv = (velocity[1, :-1, 1:] - velocity[1, :-1, :-1]) / 0.1  # lost here
    return du + dv
