"""Linear operators and solvers; imports torch only.

Operators apply a matrix that is never formed. `DenseOperator`, `DiagonalOperator` and
`SparseOperator` wrap what they are named after. `CirculantOperator` is a leading block of a
circulant given by its spectrum: covariances, roots and preconditioners on a torus.
`ToeplitzOperator` is a stationary covariance given by its lags, exact for any lags.
"""

from dustmap.linalg._circulant import CirculantOperator as CirculantOperator
from dustmap.linalg._fft import fast_length as fast_length
from dustmap.linalg._operator import AbstractOperator as AbstractOperator
from dustmap.linalg._operator import DenseOperator as DenseOperator
from dustmap.linalg._operator import DiagonalOperator as DiagonalOperator
from dustmap.linalg._operator import SparseOperator as SparseOperator
from dustmap.linalg._operator import TransposedOperator as TransposedOperator
from dustmap.linalg._toeplitz import ToeplitzOperator as ToeplitzOperator
