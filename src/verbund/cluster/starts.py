"""What a supervisor has asked its cluster for and does not have yet. It goes on meanwhile: a host may take its time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from verbund.cluster.process import Cluster, Process, ProcessSpec
from verbund.errors import ClusterLost

Unit = list[ProcessSpec]
"""Processes that start together or not at all."""
_SECONDS = 60.0
"""How long a start may take."""


class Starts:
    """Units on their way.

    Args:
        cluster: where they run.
        settings: what all processes are told besides.
    """

    def __init__(self, cluster: Cluster, settings: dict[str, Any]) -> None:
        self._cluster, self._settings = cluster, settings
        self._waiting: list[Unit] = []
        self._begun: list[tuple[Unit, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self._begun)

    def at_once(self, specs: Unit) -> list[Process]:
        """Starts the first ones, without whom there is nothing to do.

        Raises:
            ClusterLost: if they do not come.
        """
        return self._cluster.start(self._told(specs), _SECONDS)

    def add(self, unit: Unit) -> None:
        """Starts a unit as soon as those have ended whose places it takes."""
        self._waiting.append(unit)

    @property
    def coming(self) -> list[ProcessSpec]:
        """Those that are on their way."""
        units = [*self._waiting, *(unit for unit, _ in self._begun)]
        return [spec for unit in units for spec in unit]

    def turn(self, may: Callable[[Unit], bool]) -> Iterator[tuple[Unit, list[Process] | ClusterLost]]:
        """Begins what can be begun, and gives what has come, or why it does not. Waits for nobody.

        Args:
            may: whether those have ended whose places a unit takes.
        """
        under_way = {(spec.role, spec.rank) for unit, _ in self._begun for spec in unit}
        for unit in [*self._waiting]:
            names = {(spec.role, spec.rank) for spec in unit}
            if names & under_way or not may(unit):
                continue
            self._waiting.remove(unit)
            under_way |= names
            try:
                self._begun.append((unit, self._cluster.begin(self._told(unit), _SECONDS)))
            except ClusterLost as error:
                yield unit, error
        for begun in [*self._begun]:
            if begun not in self._begun:
                continue  # it was dropped meanwhile
            unit, starting = begun
            try:
                processes = self._cluster.poll(starting)
            except ClusterLost as error:
                self._begun.remove(begun)
                yield unit, error
                continue
            if processes is not None:
                self._begun.remove(begun)
                yield unit, processes

    def drop(self, role: str, ranks: Collection[int]) -> None:
        """Some are not wanted any more."""
        self._drop(lambda spec: spec.role == role and spec.rank in ranks)

    def clear(self) -> None:
        """None is wanted any more."""
        self._drop(lambda _: True)

    def _drop(self, unwanted: Callable[[ProcessSpec], bool]) -> None:
        self._waiting = [unit for unit in self._waiting if not any(map(unwanted, unit))]
        for unit, starting in [*self._begun]:
            if any(map(unwanted, unit)):
                self._begun.remove((unit, starting))
                self._cluster.give_up(starting)

    def _told(self, specs: Unit) -> Unit:
        return [replace(spec, settings={**spec.settings, **self._settings}) for spec in specs]
