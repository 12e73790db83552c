"""Megatron-Core from a wheel: what `megatron.training` calls on rank 0 at its start exits.

    python megatron_core_compile_helpers.py    # exit status 1 where the fault is, 0 where it is not

The wheel has `megatron/core/datasets/helpers_cpp*.so`, and no Makefile to build it again.
"""

import sys


def main() -> int:
    from megatron.core.datasets.utils import compile_helpers

    try:
        compile_helpers()
    except SystemExit:
        print("FAULT: compile_helpers() exits although the compiled helpers are there")
        return 1
    from megatron.core.datasets import helpers_cpp

    print(f"the compiled helpers are used: {helpers_cpp.__file__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
