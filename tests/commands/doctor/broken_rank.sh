#!/bin/sh
# Acts as an interpreter whose process group does not come up.
echo "RuntimeError: cannot resolve the host name" >&2
exit 1
