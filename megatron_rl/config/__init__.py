"""The one typed configuration tree of a run.

It is read from a YAML file and dotted command-line overrides (`--schedule.steps 40`), imports
without torch, and rejects unknown keys, bad values and sizes that do not fit together. The string
under a field is its help text; units are in the names.
"""

from megatron_rl.algorithm.settings import Algorithm as Algorithm
from megatron_rl.config.describe import describe as describe
from megatron_rl.config.load import CONFIG_FILE as CONFIG_FILE
from megatron_rl.config.load import load_config as load_config
from megatron_rl.config.load import save_config as save_config
from megatron_rl.config.run import NAMED_MODELS as NAMED_MODELS
from megatron_rl.config.run import TINY_MODELS as TINY_MODELS
from megatron_rl.config.run import RunConfig as RunConfig
from megatron_rl.config.sections import Evaluation as Evaluation
from megatron_rl.config.sections import Parallel as Parallel
from megatron_rl.config.sections import Timeouts as Timeouts
from megatron_rl.config.tasks import ArithmeticTask as ArithmeticTask
from megatron_rl.config.tasks import DataSetTask as DataSetTask
from megatron_rl.config.tasks import HuggingFaceTask as HuggingFaceTask
from megatron_rl.config.tasks import JsonlTask as JsonlTask
from megatron_rl.config.tasks import LookupTask as LookupTask
from megatron_rl.config.tasks import ReasoningTask as ReasoningTask
from megatron_rl.config.tasks import Task as Task
from megatron_rl.section import ConfigError as ConfigError
from megatron_rl.section import Section as Section
