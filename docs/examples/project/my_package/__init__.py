"""The package that the examples of the documentation check."""

from my_package.data import batches as batches
from my_package.model import Model as Model
