"""Log the numbers of a result to a tracker of experiments.

    python examples/track.py report.json --to mlflow

The result is a file that quanterr wrote: a report, ranking, evaluation, plan or inspection. Its numbers have the names
that gates use, such as ``global/snr_db``; those of a candidate begin with its name.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import quanterr

PROJECT = "quanterr"


def to_mlflow(name: str, numbers: dict[str, float]) -> None:
    """Log to MLflow, where MLFLOW_TRACKING_URI says."""
    import mlflow

    mlflow.set_experiment(PROJECT)
    with mlflow.start_run(run_name=name):
        mlflow.log_metrics(numbers)


def to_wandb(name: str, numbers: dict[str, float]) -> None:
    """Log to Weights & Biases."""
    import wandb

    with wandb.init(project=PROJECT, name=name) as run:
        run.log(numbers)


def to_trackio(name: str, numbers: dict[str, float]) -> None:
    """Log to trackio."""
    import trackio

    trackio.init(project=PROJECT, name=name)
    trackio.log(numbers)
    trackio.finish()


def to_tensorboard(name: str, numbers: dict[str, float]) -> None:
    """Log to TensorBoard, in the folder runs/."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(f"runs/{name}") as writer:
        for key, value in numbers.items():
            writer.add_scalar(key, value)


TRACKERS: dict[str, Callable[[str, dict[str, float]], None]] = {
    "mlflow": to_mlflow,
    "wandb": to_wandb,
    "trackio": to_trackio,
    "tensorboard": to_tensorboard,
}


def main() -> None:
    """Read the result and log its numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--to", choices=TRACKERS, default="mlflow")
    given = parser.parse_args()
    TRACKERS[given.to](given.result.stem, quanterr.read_document(given.result).metrics())


if __name__ == "__main__":
    main()
