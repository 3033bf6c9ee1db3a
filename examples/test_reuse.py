"""A whole regression test. Run: pytest examples/test_reuse.py --llamahybrid-lib FOLDER_OF_YOUR_LIBLLAMA"""

from llamahybrid.assertions import assert_reuse, assert_same_answer, assert_sound


def test_a_chat_is_reused_and_answered_as_without_a_cache(llamahybrid_check):
    report = llamahybrid_check("thinking stripped", arch="qwen35")
    assert_same_answer(report)
    assert_reuse(report, at_least=0.9)


def test_the_native_memory_is_sound(llamahybrid_lib):
    assert_sound(llamahybrid_lib)
