"""Image files served to CRIU through pipes: the other end of its ``--stream``, where nothing is stored.

The one rule: a byte is in memory once, on its way. What goes wrong here ends the pipe, so CRIU fails; the reason is
kept, and raised in place of CRIU's complaint.

The protocol is CRIU's own (img-streamer.c, images/img-streamer.proto): on a Unix stream socket in the image directory,
each request is a length and a message with a file name; the answer is a length and a message that says whether it is
there; if so, CRIU sends the writing end of a pipe, with one byte beside it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from coldsnap.artifact.pageimage import read_image
from coldsnap.drivers.page_images import Feed, page_images
from coldsnap.errors import ColdSnapError, DriverError
from coldsnap.transfer.native import NativeLibrary
from coldsnap.transfer.native_images import ImageMoved

__all__ = ["ImageServer", "serving"]

SOCKET = "streamer-serve.sock"
LENGTH = struct.Struct("<I")
PRESENT, ABSENT = b"\x08\x01", b"\x08\x00"
PIPE_BYTES = 1 << 20
"""What a pipe may hold without privileges (/proc/sys/fs/pipe-max-size); the default is a sixteenth of it."""


class ImageServer:
    """Answers one CRIU.

    Attributes:
        directory_fd: What to show CRIU as its image directory.
        moved: What each compressed file of pages took, once it has been asked for.
    """

    def __init__(
        self,
        directory_fd: int,
        images_fd: int,
        replace: Mapping[str, bytes],
        feed: Feed,
        library: NativeLibrary,
    ) -> None:
        self.directory_fd, self._images_fd, self._replace = directory_fd, images_fd, replace
        self._feed, self._library = feed, library
        self._stored = page_images(images_fd)
        self._failure: BaseException | None = None
        self.moved: list[ImageMoved] = []
        self._pumps: list[threading.Thread] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"/proc/self/fd/{directory_fd}/{SOCKET}")
        self._socket.listen(1)
        self._thread = threading.Thread(target=self._serve, name="criu-images", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for what is on its way, and stop.

        Raises:
            ColdSnapError: What went wrong here; CRIU has failed because of it.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends an accept
        self._thread.join()
        self._socket.close()
        for pump in self._pumps:
            pump.join()
        if self._failure is not None:
            raise self._failure

    def _serve(self) -> None:
        with suppress(OSError):
            connection, _ = self._socket.accept()
            with connection:
                while (name := _request(connection)) is not None:
                    here = name in self._replace or name in self._stored or self._exists(name)
                    answer = PRESENT if here else ABSENT
                    connection.sendall(LENGTH.pack(len(answer)) + answer)
                    if here:
                        _, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
                        pump = threading.Thread(target=self._pump, args=(name, fd), name=f"criu-{name}", daemon=True)
                        self._pumps.append(pump)
                        pump.start()

    def _exists(self, name: str) -> bool:
        return "/" not in name and name in os.listdir(self._images_fd)

    def _pump(self, name: str, fd: int) -> None:
        try:
            self._send(name, fd)
        except BrokenPipeError:
            pass  # CRIU has read what it wanted, or has failed and says why
        except (ColdSnapError, OSError) as error:
            self._failure = self._failure or error
        finally:
            os.close(fd)

    def _send(self, name: str, fd: int) -> None:
        if (data := self._replace.get(name)) is not None:
            _write(fd, data)
            return
        stored = self._stored.get(name, name)
        source = os.open(stored, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._images_fd)
        try:
            if name in self._stored:
                _widen(fd)
                image = read_image(source, stored)
                workers, backend = self._feed.workers, self._feed.backend
                moved = self._library.unpack_pages(source, image, fd, workers=workers, backend=backend, sequential=True)
                self.moved.append(moved)
            else:
                _forward(source, fd)
        finally:
            os.close(source)


def _request(connection: socket.socket) -> str | None:
    """Read the name of the next file; None at the end."""
    head = _exactly(connection, LENGTH.size)
    if head is None:
        return None
    data = _exactly(connection, LENGTH.unpack(head)[0])
    # Field 1, a string; names of images are shorter than 128 bytes, so the length is one byte.
    if data is None or len(data) < 2 or data[0] != 0x0A or data[1] != len(data) - 2:
        raise OSError("a request of another kind than CRIU makes")
    return data[2:].decode()


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            return None
        data += part
    return data


def _widen(fd: int) -> None:
    with suppress(OSError):  # a user may hold only so many such pipes: a narrow one is slower, not wrong
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _forward(source: int, fd: int) -> None:
    size = os.fstat(source).st_size
    if size > PIPE_BYTES // 16:
        _widen(fd)
    done = 0
    while done < size:
        moved = os.splice(source, fd, size - done, offset_src=done)
        if not moved:
            raise OSError("an image file ended early")
        done += moved


@contextmanager
def serving(
    images_fd: int,
    work_fd: int,
    replace: Mapping[str, bytes],
    feed: Feed,
) -> Iterator[ImageServer]:
    """Provide a server for one restore.

    Args:
        images_fd: The image files.
        work_fd: Where to make the directory that CRIU is shown.
        replace: Files that CRIU is to see in place of those of the directory.
        feed: How many threads decompress each file of pages, and how it is read.

    Raises:
        ColdSnapError: A file could not be served; in place of the error of CRIU that comes of it.
    """
    name = f"stream-{secrets.token_hex(4)}"
    os.mkdir(name, 0o700, dir_fd=work_fd)
    directory_fd = os.open(name, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC, dir_fd=work_fd)
    try:
        server = ImageServer(directory_fd, images_fd, replace, feed, feed.library or NativeLibrary.load())
        try:
            yield server
        except DriverError as error:
            _close(server, error)
            raise
        except BaseException:
            with suppress(ColdSnapError, OSError):  # the error in flight is the one to tell of
                server.close()
            raise
        else:
            server.close()
    finally:
        with suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=directory_fd)
        os.close(directory_fd)
        os.rmdir(name, dir_fd=work_fd)


def _close(server: ImageServer, error: DriverError) -> None:
    try:
        server.close()
    except (ColdSnapError, OSError) as reason:
        raise reason from error
