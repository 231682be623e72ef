"""What all tests of the plugin have in common."""

from plugin_suite import outside_of_workers as outside_of_workers
from plugin_suite import sample as sample
from plugin_suite import section as section
from plugin_suite import spread as spread
from plugin_suite import suite as suite
