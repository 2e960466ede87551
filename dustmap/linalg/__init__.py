"""Linear operators and solvers; imports torch, and scipy for elliptic functions.

Operators apply a matrix that is never formed. `DenseOperator`, `DiagonalOperator` and
`SparseOperator` wrap what they are named after. `CirculantOperator` is a leading block of a
circulant given by its spectrum: covariances, roots and preconditioners on a torus. An
`AbstractStack` has a matrix of its own for every vector.
`ToeplitzOperator` is a stationary covariance given by its lags, exact for any lags.
`HartleyOperator` is the block of a circulant for boxes of short axes, by products of matrices.

`pcg` solves A x = b for many right-hand sides, each on its own; `block_pcg` lets them share one
Krylov space, which takes fewer steps where products with A outweigh k² n operations per step.
Both report on every column in a `SolveResult`.
`covariance_cg` solves (I + B K) v = b for information B and covariance K, in vectors that are
shorter than the data where B is a `SparseGram` of many rows.
`nystrom` makes a preconditioner for shift · I + G of a few products with it.
`toeplitz_solve` is `pcg` for a Toeplitz matrix, differentiable in its lags and in b.

`inverse_root` and `square_root` are K^{-1/2} b and K^{1/2} b by contour integral quadrature, for
any operator: differentiable in what it is made of and in b. `RootMethod` says how;
`shifted_minres` solves for all the shifts of the quadrature in one Krylov space.

`ShardedRows`, `DividedColumns` and `DividedRows` share the work of operators among the ranks of an
`AbstractWorld`; to a solver they are like any other.

`KeyedNormal` makes normal numbers that depend on nothing but their address.
`TilePartition` cuts grid vectors into blocks of neighbouring points and back.
"""

from dustmap.linalg._block_cg import block_pcg as block_pcg
from dustmap.linalg._cg import pcg as pcg
from dustmap.linalg._cg import toeplitz_solve as toeplitz_solve
from dustmap.linalg._chunks import AT_MOST as AT_MOST
from dustmap.linalg._chunks import HALVED as HALVED
from dustmap.linalg._chunks import AdaptiveBatch as AdaptiveBatch
from dustmap.linalg._chunks import KeptNumbers as KeptNumbers
from dustmap.linalg._chunks import KeyedNormal as KeyedNormal
from dustmap.linalg._chunks import OutOfMemory as OutOfMemory
from dustmap.linalg._chunks import Progress as Progress
from dustmap.linalg._chunks import TilePartition as TilePartition
from dustmap.linalg._chunks import chunks as chunks
from dustmap.linalg._chunks import counter_normal as counter_normal
from dustmap.linalg._chunks import counter_uniform as counter_uniform
from dustmap.linalg._chunks import in_one_part as in_one_part
from dustmap.linalg._chunks import keyed_normal as keyed_normal
from dustmap.linalg._chunks import numbers_together as numbers_together
from dustmap.linalg._chunks import out_of_memory as out_of_memory
from dustmap.linalg._chunks import return_memory as return_memory
from dustmap.linalg._chunks import standard_normal as standard_normal
from dustmap.linalg._chunks import unwatched as unwatched
from dustmap.linalg._chunks import watched_chunks as watched_chunks
from dustmap.linalg._ciq import InverseRootOperator as InverseRootOperator
from dustmap.linalg._ciq import RootMethod as RootMethod
from dustmap.linalg._ciq import RootResult as RootResult
from dustmap.linalg._ciq import inverse_root as inverse_root
from dustmap.linalg._ciq import square_root as square_root
from dustmap.linalg._contour import RootQuadrature as RootQuadrature
from dustmap.linalg._contour import SpectrumBounds as SpectrumBounds
from dustmap.linalg._contour import largest_eigenvalue as largest_eigenvalue
from dustmap.linalg._contour import spectrum_bounds as spectrum_bounds
from dustmap.linalg._covariance_cg import AbstractInformation as AbstractInformation
from dustmap.linalg._covariance_cg import CovarianceNystrom as CovarianceNystrom
from dustmap.linalg._covariance_cg import CovarianceSolve as CovarianceSolve
from dustmap.linalg._covariance_cg import covariance_cg as covariance_cg
from dustmap.linalg._hartley import HartleyOperator as HartleyOperator
from dustmap.linalg._hartley import circulant_block as circulant_block
from dustmap.linalg._iteration import SolveResult as SolveResult
from dustmap.linalg._iteration import SolveStatus as SolveStatus
from dustmap.linalg._iteration import UnconvergedWarning as UnconvergedWarning
from dustmap.linalg._minres import ShiftedSolve as ShiftedSolve
from dustmap.linalg._minres import shifted_minres as shifted_minres
from dustmap.linalg._operator import AbstractAdjointPair as AbstractAdjointPair
from dustmap.linalg._operator import AbstractComposite as AbstractComposite
from dustmap.linalg._operator import AbstractOperator as AbstractOperator
from dustmap.linalg._operator import AbstractStack as AbstractStack
from dustmap.linalg._operator import AbstractSymmetric as AbstractSymmetric
from dustmap.linalg._operator import DenseOperator as DenseOperator
from dustmap.linalg._operator import DiagonalOperator as DiagonalOperator
from dustmap.linalg._operator import TransposedOperator as TransposedOperator
from dustmap.linalg._operator import apply_linear as apply_linear
from dustmap.linalg._operator import check_vectors as check_vectors
from dustmap.linalg._preconditioners import NystromPreconditioner as NystromPreconditioner
from dustmap.linalg._preconditioners import NystromStack as NystromStack
from dustmap.linalg._preconditioners import PreconditionedOperator as PreconditionedOperator
from dustmap.linalg._preconditioners import RootPreconditioner as RootPreconditioner
from dustmap.linalg._preconditioners import nystrom as nystrom
from dustmap.linalg._row_products import has_programs as has_programs
from dustmap.linalg._sparse import EnteredOperator as EnteredOperator
from dustmap.linalg._sparse import SparseGram as SparseGram
from dustmap.linalg._sparse import SparseOperator as SparseOperator
from dustmap.linalg._sparse import entered_columns as entered_columns
from dustmap.linalg._sparse import estimated_entries as estimated_entries
from dustmap.linalg._sparse import gram_making_bytes as gram_making_bytes
from dustmap.linalg._sparse import row_slice as row_slice
from dustmap.linalg._toeplitz import CirculantOperator as CirculantOperator
from dustmap.linalg._toeplitz import ToeplitzOperator as ToeplitzOperator
from dustmap.linalg._toeplitz import fast_length as fast_length
from dustmap.linalg._toeplitz import mirrored as mirrored
from dustmap.linalg._toeplitz import multiplicity as multiplicity
from dustmap.linalg._toeplitz import quadratic_forms as quadratic_forms
from dustmap.linalg._world import AbstractWorld as AbstractWorld
from dustmap.linalg._world import Alone as Alone
from dustmap.linalg._world import DividedColumns as DividedColumns
from dustmap.linalg._world import DividedRows as DividedRows
from dustmap.linalg._world import ShardedRows as ShardedRows
from dustmap.linalg._world import divided as divided
