"""What runs on the simulated device: each capability in a short training run. A scenario returns tensors that must not depend on the order
in which streams work.

The same scenario runs with ranks on the CPU, for numbers that no device had a hand in.
"""

from tests.device.scenarios import doors, meshes, offload, policies, steps
from tests.device.scenarios.registry import SCENARIOS, Scenario

__all__ = ["ON_MESHES", "SCENARIOS", "Scenario", "doors", "meshes", "offload", "policies", "steps"]

ON_MESHES = {name for name in SCENARIOS if "mesh" in name}  # they need four ranks
