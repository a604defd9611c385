"""Frames of ZMQ messages: how they are received and read without copying their bytes."""

from __future__ import annotations

import zmq

Frame = bytes | zmq.Frame
"""Large frames stay in the memory that ZMQ received them in, and are sent on from there."""


def view(frame: Frame) -> memoryview:
    """The bytes of a frame, not copied."""
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def receive(socket: zmq.Socket[bytes], flags: int = 0) -> list[zmq.Frame]:
    """The frames of one message. Faster than recv_multipart, which asks the socket after each frame for more."""
    frames = [frame := socket.recv(flags, copy=False)]
    while frame.more:
        frames.append(frame := socket.recv(flags, copy=False))
    return frames
