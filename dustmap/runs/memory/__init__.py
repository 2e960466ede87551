"""What a run will hold in memory, and how long it will take, before it starts."""

from dustmap.runs.memory._allotment import DRAW_VECTORS as DRAW_VECTORS
from dustmap.runs.memory._allotment import FIELD_VECTORS as FIELD_VECTORS
from dustmap.runs.memory._allotment import KRIGING as KRIGING
from dustmap.runs.memory._allotment import LINEAR as LINEAR
from dustmap.runs.memory._allotment import RANK_VECTORS as RANK_VECTORS
from dustmap.runs.memory._allotment import SPECTRA as SPECTRA
from dustmap.runs.memory._allotment import WORKING as WORKING
from dustmap.runs.memory._allotment import Sizes as Sizes
from dustmap.runs.memory._allotment import allotted as allotted
from dustmap.runs.memory._allotment import rows_needed as rows_needed
from dustmap.runs.memory._parts import export_components as export_components
from dustmap.runs.memory._parts import finish_components as finish_components
from dustmap.runs.memory._parts import star_components as star_components
from dustmap.runs.memory._plan import MIB as MIB
from dustmap.runs.memory._plan import Component as Component
from dustmap.runs.memory._plan import During as During
from dustmap.runs.memory._plan import MemoryPlan as MemoryPlan
from dustmap.runs.memory._plan import shown as shown
from dustmap.runs.memory._plan import table_of as table_of
from dustmap.runs.memory._seconds import OVERHEAD as OVERHEAD
from dustmap.runs.memory._seconds import dense_seconds as dense_seconds
from dustmap.runs.memory._seconds import estimated_seconds as estimated_seconds
from dustmap.runs.memory._seconds import rounded as rounded
