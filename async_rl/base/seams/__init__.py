"""The seams (exchangeable parts) whose tables are in this package, and what each implementation declares about itself.

    configuration key           table            an entry declares                            its code
    algorithm.advantage         ADVANTAGES       what is compared, whether it has a critic   rewards -> advantages
    algorithm.loss              LOSSES           which advantages and aggregations it takes   LossInputs -> LossOutput
    algorithm.correction.kind   CORRECTIONS      whether it reads advantages                  log ratios -> weights
    rollout.engine              ENGINES          how it takes new weights                     an `Engine`
    weight_sync.transport       TRANSPORTS       between which devices and hosts it works     a `Transport`

The other seams are in rollout_server: tasks, rewards, environments, agents and tools. learner.optimizer names an
optimizer of torch, or any importable one: learner/loop/optimizer.py.

A value in the configuration is either a name in the table or `module:name`, which must be an entry of the same class
in an importable module. The rest of the code asks entries for what they declare and never compares names.

An entry names its code as `module:name` and imports it on first use, so that a configuration can be checked, and the
buffer can run, without torch.
"""

from async_rl.base.seams.algorithms import ADVANTAGES, CORRECTIONS, LOSSES, Advantage, Correction, Loss
from async_rl.base.seams.engines import ENGINES, TRANSPORTS, EngineEntry, TransportEntry, working_transports
from async_rl.base.seams.lookup import find_entry, import_object

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "ENGINES",
    "LOSSES",
    "TRANSPORTS",
    "Advantage",
    "Correction",
    "EngineEntry",
    "Loss",
    "TransportEntry",
    "find_entry",
    "import_object",
    "working_transports",
]
