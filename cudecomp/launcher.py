# SPDX-License-Identifier: Apache-2.0
"""Owns what the launchers of MPI programs say in the environment; knows nothing of MPI, which is not there yet."""

from __future__ import annotations

import os

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID")
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

# How the variables begin that make a process part of a job. Those that say where an MPI is installed begin alike, and
# stay.
JOB_VARIABLES = (
    *("PMI_", "PMIX_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_"),
    *("OMPI_COMM_WORLD", "OMPI_UNIVERSE", "OMPI_APP_CTX", "OMPI_NUM_APP_CTX", "OMPI_FIRST_RANKS", "OMPI_FILE_LOCATION"),
    *("OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix"),  # how Open MPI 4 finds its launcher
)
INSTALLATION = "_PREFIX"


def launched_rank() -> int | None:
    """Return the rank that a launcher gave this process, None if there was no launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdecimal()), None)


def launched_size() -> int:
    """Return how many processes a launcher says that it has started, 1 if there was no launcher."""
    return max(int(os.environ.get(name) or 1) for name in SIZE_VARIABLES)


def environment_of_no_job() -> dict[str, str]:
    """Return this process's environment without what makes it a rank: a child is an MPI job of its own."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(JOB_VARIABLES) or name.endswith(INSTALLATION)
    }
