"""What a configuration means: kernel, mean, noise, grid, precisions; and what a fit is."""

from dustmap.runs.models._fit import Arrays as Arrays
from dustmap.runs.models._fit import Hyperparameters as Hyperparameters
from dustmap.runs.models._fit import Learning as Learning
from dustmap.runs.models._fit import StarFit as StarFit
from dustmap.runs.models._fit import Tell as Tell
from dustmap.runs.models._fit import silent as silent
from dustmap.runs.models._grid import coarse_grid as coarse_grid
from dustmap.runs.models._grid import dtype_of as dtype_of
from dustmap.runs.models._grid import grid_of as grid_of
from dustmap.runs.models._parts import Parts as Parts
from dustmap.runs.models._parts import dust_of as dust_of
from dustmap.runs.models._parts import kernel_of as kernel_of
from dustmap.runs.models._parts import learned_kernel as learned_kernel
from dustmap.runs.models._parts import learned_mean as learned_mean
from dustmap.runs.models._parts import learned_names as learned_names
from dustmap.runs.models._parts import likelihood_of as likelihood_of
from dustmap.runs.models._parts import log_profile_of as log_profile_of
from dustmap.runs.models._parts import noise_of as noise_of
from dustmap.runs.models._parts import profile_of as profile_of
from dustmap.runs.models._parts import scale_with_nu as scale_with_nu
from dustmap.runs.models._parts import start_of as start_of
