"""What a model's text holds beside plain content: reasoning and calls of tools, one small parser a family.

Each parser is fed text as it comes and gives pieces. It decides character by character, so that every way in which a
text comes in parts gives the same pieces; and what turns out to be no call after all is content: no text is lost but
markers and the white space around them.
"""
