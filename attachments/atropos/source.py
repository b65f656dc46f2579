"""Interfaces of the Atropos fetcher (a source of groups and their reader), and the backoff between two polls."""

from __future__ import annotations
