"""The reddening of Hipparcos stars: `catalogs/hipparcos_reddening.csv.gz` from the raw table.

    python -m pipelines.hipparcos RAW.csv.gz catalogs/hipparcos_reddening.csv.gz

E(B−V) = (B−V) − (B−V)₀. `_types` reads spectral types, `_colours` has the intrinsic colours of a
published table, `_parallaxes` the errors of parallaxes, `_classes` the classes of stars, their zero
points and their spread, measured where there is no dust; `_catalogue` puts them together.
"""

from pipelines.hipparcos._classes import CLASSES as CLASSES
from pipelines.hipparcos._classes import ReferenceStars as ReferenceStars
from pipelines.hipparcos._classes import calibrate as calibrate
from pipelines.hipparcos._classes import class_of as class_of
from pipelines.hipparcos._colours import IntrinsicColours as IntrinsicColours
from pipelines.hipparcos._parallaxes import ParallaxLaw as ParallaxLaw
from pipelines.hipparcos._parallaxes import fit_parallax_law as fit_parallax_law
from pipelines.hipparcos._types import SpectralType as SpectralType
from pipelines.hipparcos._types import parse_type as parse_type
