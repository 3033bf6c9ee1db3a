"""A report for people and machines: terminal, Markdown, JUnit XML, and one page of HTML."""
