"""Float64 values carried along with every tensor of the run: companions, rules per op, bounds, faults."""

from ampcheck.facts.history import Step as Step
from ampcheck.shadow.bounds import Examination as Examination
from ampcheck.shadow.explain import explain_error as explain_error
from ampcheck.shadow.faults import Fault as Fault
from ampcheck.shadow.mode import Shadow as Shadow
from ampcheck.shadow.result import Reference as Reference
