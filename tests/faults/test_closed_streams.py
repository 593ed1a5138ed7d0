"""Programs that start with descriptors 0, 1 or 2 closed, as cron and daemons start them."""

from __future__ import annotations

from helpers.matrix import matrix


@matrix(strength=1, closed=["0", "1", "2", "0, 1, 2"], workers=[0, 1])
def test_output_to_closed_streams_reaches_no_sample_and_no_message_of_a_decoder(
    start_program, tmp_path, closed, workers
):
    program = start_program(f"""
        for number in ({closed},):
            os.close(number)
        open_before = [number for number in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{{number}}")]

        def speak(index):
            for number in (1, 2):
                with contextlib.suppress(OSError):  # the stream is closed
                    os.write(number, b"spoken " * 100)
            if {workers}:
                with open(f"{{tmp}}/{{os.getpid()}}.worker", "w") as file:
                    links = [os.readlink(f"/proc/self/fd/{{number}}") for number in (0, 1, 2)]
                    print(*links, file.fileno(), file=file)
                if index == 20 and happens_first("death"):
                    os.kill(os.getpid(), signal.SIGKILL)  # its replacement is checked too

        class Images(Numbers):
            def __getitem__(self, index):
                self.function(index)
                return gl.Image(np.full((8, 8, 3), index, np.uint8)), gl.read(file), np.full(4096, index), index

        file = next(Path(folder).glob("*/*.jpg"))
        with gl.Loader(Images(speak), 4, num_workers={workers}, chunk_size=2, device="cpu") as loader:
            for images, photos, arrays, indices in loader:
                for number in (1, 2):
                    with contextlib.suppress(OSError):
                        os.write(number, b"spoken here " * 100)
                assert (images == indices[:, None, None, None]).all() and (arrays == indices[:, None]).all(), indices
                assert (photos == photos[0]).all(), indices
                open_now = [number for number in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{{number}}")]
                assert open_now == open_before, open_now
        open(f"{{tmp}}/good", "w").close()
    """)
    code, error = program.end()
    assert (code, (tmp_path / "good").exists()) == (0, True), error
    worker_files = list(tmp_path.glob("*.worker"))
    assert len(worker_files) == 2 * workers  # a worker and its replacement
    for file in worker_files:
        *links, new_descriptor = file.read_text().split()
        for number, link in enumerate(links):
            assert link == "/dev/null" if str(number) in closed else "memfd" not in link, (number, link)
        assert int(new_descriptor) > 2
