"""The client side: text in, text out, and the faces of an engine."""

from engine.client.client import EngineCoreClient as EngineCoreClient
