"""The queue counts what it holds, and keeps its order, whatever leaves it and comes back."""

from __future__ import annotations

import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from halteres.trajectories.forming.lanes import Queue

from .queues import filled, queues, record


