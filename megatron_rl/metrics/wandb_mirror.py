"""Mirror of metrics.jsonl to Weights & Biases.

Rows become `train/<name>` and `eval/<name>` with their own step metric (`train/step`,
`eval/step`), so that evaluations may come late and a resumed run goes on in the same charts.
wandb's own step counter is not used: it drops rows of a step that it has already committed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from megatron_rl.metrics.mirror import PREFIX, MirrorError, histogram, scalars

INIT_TIMEOUT_SECONDS = 90
FINISH_TIMEOUT_SECONDS = 60


class WandbMirror:
    """One wandb run that rows are copied to; the only writer of that run.

    Args:
        output_dir: the run's folder; wandb's files go to `<output_dir>/wandb`, its run id to
            `<output_dir>/wandb_run_id.txt`.
        mode: `offline` writes files only (`wandb sync` uploads them later).
        first_step: updates already made; above 0, the run of the id file goes on.
        config: the resolved configuration, shown with the run.
        project: wandb project.
        name: shown name; the folder's name by default.

    Raises:
        MirrorError: wandb is not installed, or did not start.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        mode: Literal["offline", "online"],
        first_step: int = 0,
        config: dict[str, Any] | None = None,
        project: str = "megatron_rl",
        name: str | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as e:
            raise MirrorError(
                "metrics.wandb is on and wandb is not installed:"
                " pip install 'megatron_rl[io]', or metrics.wandb=off"
            ) from e
        self._wandb = wandb
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "wandb_run_id.txt"
        run_id = id_file.read_text().strip() if first_step and id_file.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                name=name or folder.name,
                id=run_id,
                # Offline runs cannot ask the server; the id alone joins them at `wandb sync`.
                resume="allow" if run_id and mode == "online" else None,
                dir=str(folder),
                mode=mode,
                config=config,
                settings=wandb.Settings(
                    init_timeout=INIT_TIMEOUT_SECONDS,
                    finish_timeout=FINISH_TIMEOUT_SECONDS,
                    console="off",
                    silent=True,
                ),
            )
        except wandb.Error as e:
            raise MirrorError(f"metrics.wandb is {mode} and wandb did not start: {e}") from e
        id_file.write_text(self._run.id)
        for prefix in PREFIX.values():
            self._run.define_metric(f"{prefix}/step")
            self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")

    def log(self, kind: str, step: int, row: dict[str, Any]) -> None:
        """Copy a row of kind `step` or `eval`; other kinds, text and lists are left out."""
        prefix = PREFIX.get(kind)
        if prefix is None:
            return
        values: dict[str, Any] = {f"{prefix}/{k}": v for k, v in scalars(row).items()}
        for name, value in row.items():
            if bins := histogram(value):
                counts = [count for _, count in bins]
                edges = [x - 0.5 for x, _ in bins] + [bins[-1][0] + 0.5]
                values[f"{prefix}/{name}"] = self._wandb.Histogram(np_histogram=(counts, edges))
        self._run.log(values | {f"{prefix}/step": step})

    def close(self) -> None:
        """End the wandb run and wandb's service; waits at most a minute for uploads.

        `finish` alone comes back before the service has written its file (wandb 0.31): a
        container that ends with its main process would take the last rows with it.
        """
        self._run.finish()
        self._wandb.teardown()
