"""Extinction systems: what a magnitude of extinction means, and what it is in another system."""

from dustmap.sky.systems._systems import CUSTOM as CUSTOM
from dustmap.sky.systems._systems import ExtinctionSystem as ExtinctionSystem
from dustmap.sky.systems._systems import conversion as conversion
from dustmap.sky.systems._systems import known_systems as known_systems
from dustmap.sky.systems._systems import system_named as system_named
