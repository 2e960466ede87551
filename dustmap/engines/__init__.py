"""Engines: from a model and its data to the posterior of the field.

Start at `_engine`: an engine is a value with typed settings that plans its memory, fits a
`Problem` and loads what an earlier fit has left. Star maps and estimators use the same ones:

    exact        dense algebra, to 20,000 data
    inducing     "hip": inducing points on a grid; whitening and family are values of its plan
    free points  "svgp", "sgpr": inducing points anywhere, in any dimension
    pathwise     "global": sparse weights on a grid, one solve for mean and draws
    lognormal    positive densities on the map's grid
    automatic    one of these for point values, by rows, columns and the kernel
    student-t    around exact or pathwise, for point values with outliers

`choose_kernel` decides how smooth the kernel of point values is, before any of them, and
`choose_ray_kernel` that of a density that rays see.

A new engine is one module here, a line in the table of whoever offers it (`runs/stars/_engines`,
`estimators/_engines`) and its keys in the configuration.

Examples
--------
The same thirteen values of a sine, by five engines at a fixed kernel:

>>> from dustmap.gp import Batch, ConstantMean, GPModel, RegularGrid, functionals, kernels
>>> from dustmap.gp.likelihoods import GaussianLikelihood
>>> x = torch.linspace(0.0, 3.0, 13, dtype=torch.float64)[:, None]
>>> y = torch.sin(x[:, 0])
>>> data = Batch(functionals.PointValues(x), y, torch.full_like(y, 0.01))
>>> kernel, mean = kernels.Matern32(1.0, dim=1).fixed(), ConstantMean(learn=False)
>>> problem = Problem(GPModel(kernel, mean, GaussianLikelihood(learn=False)), data)
>>> learning, grid = EvidenceSettings(rows=13), RegularGrid.from_bounds((0.0,), (3.0,), (25,))
>>> points = PointSettings(64, 4.0, torch.float64, 2**30, grid=grid)
>>> exact = ExactEngine(ExactSettings(learning, max_memory=2**30))
>>> for engine in (
...     exact,
...     InducingEngine(InducingSettings(learning, grid=grid)),
...     PathwiseEngine(PathwiseSettings(points, learning)),
...     FreePointsEngine(FreePointSettings(inducing=13, learn_points=False), collapsed=True),
...     StudentTEngine(exact, learning),
... ):
...     fit = engine.fit(problem, Watch())
...     print(round(float(fit.posterior.predict(data.functional[6:7]).mean), 3))
0.996
0.996
0.996
0.996
0.995
>>> exact.plan(problem).peak < 2**30
True
"""

from dustmap.engines._automatic import MAX_GRID_DIM as MAX_GRID_DIM
from dustmap.engines._automatic import AutomaticEngine as AutomaticEngine
from dustmap.engines._automatic import EngineChoice as EngineChoice
from dustmap.engines._engine import AbstractEngine as AbstractEngine
from dustmap.engines._engine import Arrays as Arrays
from dustmap.engines._engine import EngineFit as EngineFit
from dustmap.engines._engine import Learning as Learning
from dustmap.engines._engine import Problem as Problem
from dustmap.engines._engine import Watch as Watch
from dustmap.engines._engine import quantity_errors as quantity_errors
from dustmap.engines._exact import WEIGHTED_ROWS as WEIGHTED_ROWS
from dustmap.engines._exact import ExactEngine as ExactEngine
from dustmap.engines._exact import ExactSettings as ExactSettings
from dustmap.engines._free_points import FreePointPlan as FreePointPlan
from dustmap.engines._free_points import FreePointsEngine as FreePointsEngine
from dustmap.engines._free_points import FreePointSettings as FreePointSettings
from dustmap.engines._grids import refuse_outside as refuse_outside
from dustmap.engines._inducing import InducingEngine as InducingEngine
from dustmap.engines._inducing_grid import FAMILIES as FAMILIES
from dustmap.engines._inducing_grid import WHITENINGS as WHITENINGS
from dustmap.engines._inducing_grid import InducingPlan as InducingPlan
from dustmap.engines._inducing_grid import InducingSettings as InducingSettings
from dustmap.engines._inducing_report import MOST_GRADIENT as MOST_GRADIENT
from dustmap.engines._kernel_choice import CANDIDATES as CANDIDATES
from dustmap.engines._kernel_choice import FALLBACK as FALLBACK
from dustmap.engines._kernel_choice import MOST_OF_CHOICE as MOST_OF_CHOICE
from dustmap.engines._kernel_choice import KernelChoice as KernelChoice
from dustmap.engines._kernel_choice import choice_bytes as choice_bytes
from dustmap.engines._kernel_choice import choose_kernel as choose_kernel
from dustmap.engines._kernel_choice import with_profile as with_profile
from dustmap.engines._learning import MOST_DENSE as MOST_DENSE
from dustmap.engines._learning import EvidenceSettings as EvidenceSettings
from dustmap.engines._learning import Learned as Learned
from dustmap.engines._learning import learn_from_start as learn_from_start
from dustmap.engines._learning import most_exact as most_exact
from dustmap.engines._learning import rays_to_mean as rays_to_mean
from dustmap.engines._learning import searched_start as searched_start
from dustmap.engines._lognormal import LogNormalEngine as LogNormalEngine
from dustmap.engines._lognormal import LogNormalSettings as LogNormalSettings
from dustmap.engines._lognormal import drawing_bytes as drawing_bytes
from dustmap.engines._memory import MIB as MIB
from dustmap.engines._memory import SPECTRA as SPECTRA
from dustmap.engines._memory import Component as Component
from dustmap.engines._memory import During as During
from dustmap.engines._memory import GriddedSizes as GriddedSizes
from dustmap.engines._memory import MemoryPlan as MemoryPlan
from dustmap.engines._memory import shown as shown
from dustmap.engines._memory import table_of as table_of
from dustmap.engines._pathwise import PathwiseEngine as PathwiseEngine
from dustmap.engines._pathwise import PathwiseSettings as PathwiseSettings
from dustmap.engines._pathwise_points import PointPlan as PointPlan
from dustmap.engines._pathwise_points import PointSettings as PointSettings
from dustmap.engines._pathwise_points import plan_points as plan_points
from dustmap.engines._pathwise_points import some_draws as some_draws
from dustmap.engines._ray_kernels import RayData as RayData
from dustmap.engines._ray_kernels import choose_ray_kernel as choose_ray_kernel
from dustmap.engines._ray_kernels import covariances_of_choice as covariances_of_choice
from dustmap.engines._ray_kernels import ray_choice_component as ray_choice_component
from dustmap.engines._ray_kernels import ray_length as ray_length
from dustmap.engines._student_t import MOST_STUDENT_T as MOST_STUDENT_T
from dustmap.engines._student_t import StudentTEngine as StudentTEngine
from dustmap.engines._student_t import plain_part as plain_part
from dustmap.engines._student_t import plain_rows as plain_rows
