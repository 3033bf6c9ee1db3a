"""What stands for a thread."""

import threading

from llamahybrid.request.ticket import this_thread


def test_each_thread_has_a_mark_of_its_own_that_no_later_one_gets():
    marks, idents = [], []

    def note():
        marks.append((this_thread(), this_thread()))
        idents.append(threading.get_ident())

    for _ in range(20):
        thread = threading.Thread(target=note)
        thread.start()
        thread.join(20)
    note()
    assert all(first is second for first, second in marks)
    assert len({first for first, _ in marks}) == len(marks) == 21
    assert len(set(idents)) < len(idents), "no ident was given out again: nothing was at stake"
