import pytest


def test_a(tmp_path):
    f=tmp_path/"a"; f.write_text("x")
    with pytest.raises(EncodingWarning):
        exec(compile("f.read_text()","x","exec"),{"__name__":"halteres.foo","f":f})
    with pytest.raises(EncodingWarning):
        exec(compile("open(f)","x","exec"),{"__name__":"halteres.foo","f":f})
