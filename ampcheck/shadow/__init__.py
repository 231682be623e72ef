"""Float64 values carried along with every tensor of the run: companions, rules per op, bounds, faults."""

from ampcheck.facts.history import Step as Step
from ampcheck.records.faults import Fault as Fault
from ampcheck.records.results import Examination as Examination
from ampcheck.shadow.explain import explain_error as explain_error
from ampcheck.shadow.mode import Shadow as Shadow
from ampcheck.shadow.result import Reference as Reference
