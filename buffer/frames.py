"""Receives and reads the frames of ZMQ messages without copying their bytes."""

from __future__ import annotations

import zmq

Frame = bytes | zmq.Frame
"""A frame of a message. A large one stays in the memory that ZMQ received it in, and is sent on from there."""


def view(frame: Frame) -> memoryview:
    """Return a view of the bytes of a frame, without copying them."""
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def receive(socket: zmq.Socket[bytes], flags: int = 0) -> list[zmq.Frame]:
    """Wait for a message and return its frames; with zmq.NOBLOCK among `flags`, raise zmq.Again if there is none.

    This is faster than recv_multipart, which asks the socket after each frame for more.
    """
    frames = [frame := socket.recv(flags, copy=False)]
    while frame.more:
        frames.append(frame := socket.recv(flags, copy=False))
    return frames
