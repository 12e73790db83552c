"""Commands that are not run as they stand, and the test that runs the same thing.

Key: the command, with `*` for any text. Value: `file::test`; `*` for all of a file.
"""

E2E = "tests/e2e/test_examples.py"

COVERED: dict[str, str] = {
    # Set-up and suites: this test is inside of what they run.
    "make demo": f"{E2E}::test_the_run_ends_with_evaluations_a_summary_a_fit_and_a_model",
    "make setup*": "tests/docs/test_commands.py::test_the_targets_of_the_makefile_are_there",
    "make test": "tests/docs/test_commands.py::test_the_targets_of_the_makefile_are_there",
    "source .venv/bin/activate": (
        "tests/docs/test_commands.py::test_the_targets_of_the_makefile_are_there"
    ),
    # Whole runs; the end-to-end tests start the same commands with fewer steps.
    "bash examples/scalerl_tiny.sh*": (
        f"{E2E}::test_every_step_is_trained_once_within_the_lag_bound_and_nothing_is_aborted"
    ),
    "torchrun --nproc-per-node 3 examples/scalerl_tiny.sh": (
        f"{E2E}::test_every_step_is_trained_once_within_the_lag_bound_and_nothing_is_aborted"
    ),
    "torchrun examples/scalerl_tiny.sh": (
        f"{E2E}::test_every_step_is_trained_once_within_the_lag_bound_and_nothing_is_aborted"
    ),
    "megatron-rl train --config examples/scalerl_tiny.yaml --schedule.steps 40*": (
        "tests/launch/test_launch.py::"
        "test_outside_torchrun_it_starts_the_ranks_that_the_configuration_needs"
    ),
    "torchrun --nproc-per-node 2 -m megatron_rl.compat.megatron_cpu examples/pretrain_gpt.py *": (
        "tests/e2e/test_pretraining.py::test_pretraining_learns_and_the_plugin_takes_no_part"
    ),
    "megatron-rl ablate *": "tests/commands/ablate/test_ablate.py::*",
    "megatron-rl convert *": "tests/commands/convert/test_convert.py::*",
    "megatron-rl plan *": "tests/commands/plan/test_plan.py::*",
    "bash examples/scalerl_8b.sh *": (
        "tests/commands/plan/test_plan.py::test_the_dry_run_of_an_example_needs_no_gpu_and_no_checkpoint"
    ),
    "python tools/convert_checkpoint.py *": "tests/commands/convert/test_memory.py::*",
    "megatron-rl train --recipe dapo --config my_sizes.yaml": "tests/recipes/test_training.py::*",
    "megatron-rl train --config my_run.yaml --dry-run": (
        "tests/commands/plan/test_plan.py::test_the_dry_run_of_an_example_needs_no_gpu_and_no_checkpoint"
    ),
    "bash examples/scalerl_*.sh --dry-run": (
        "tests/commands/plan/test_plan.py::test_the_dry_run_of_an_example_needs_no_gpu_and_no_checkpoint"
    ),
    "megatron-rl doctor": (
        "tests/commands/doctor/test_doctor.py::test_on_this_machine_every_line_is_green_or_explained"
    ),
    "megatron-rl doctor --config my_run.yaml --json": (
        "tests/commands/doctor/test_doctor.py::test_on_this_machine_every_line_is_green_or_explained"
    ),
    # Installation from an index or a wheel.
    "pip install*": "tests/docker/test_image.py::test_the_steps_run_in_a_plain_environment",
}
