from torch import nn

from tunesmith.model.structure import replace_module


def test_a_module_is_exchanged_wherever_it_lies_and_trains_as_the_model_does():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()).eval()
    inner, outer = nn.Dropout(), nn.Dropout()
    replace_module(model, "0.0", inner)
    replace_module(model, "1", outer)
    assert model[0][0] is inner
    assert model[1] is outer
    assert not inner.training
    assert not outer.training
