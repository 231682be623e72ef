"""Emulates float8, MXFP8 and NVFP4: the losses of a model, and the layers to keep in 16 bits."""

from ampcheck.whatif.recipes import RECIPES as RECIPES
from ampcheck.whatif.recipes import Operand as Operand
from ampcheck.whatif.recipes import Recipe as Recipe
from ampcheck.whatif.report import filter_text as filter_text
from ampcheck.whatif.run import measure as measure
from ampcheck.whatif.run import whatif as whatif
from ampcheck.whatif.training import measure_training as measure_training
