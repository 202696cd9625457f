"""Run the notebooks of docs/tutorials from their first to their last cell, and write what they print and draw into them.

    python scripts/notebooks.py docs/tutorials/torch.ipynb          # as `make notebooks` does for each
    python scripts/notebooks.py --check docs/tutorials/torch.ipynb  # run it, and leave the file as it is

A cell that raises ends it with the cell's error. Times of cells and versions, which change from run to run, are not written.
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

CELL_S = 180


def run(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a new run."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", record_timing=False, coalesce_streams=True)
    client.create_kernel_manager().transport = "ipc"  # files of this user, not ports
    client.execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def main() -> None:
    """Run the notebooks that the command line names."""
    parser = argparse.ArgumentParser(description="Run notebooks and keep their outputs in them.")
    parser.add_argument("--check", action="store_true", help="leave the files as they are")
    parser.add_argument("notebooks", nargs="+", type=Path)
    args = parser.parse_args()
    for path in args.notebooks:
        notebook = run(path)
        if not args.check:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
