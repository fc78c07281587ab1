"""SOAP against Adam: in the eigenbasis they are one, and a rotation of the problem is one of the steps."""

import soap
import torch

RATE, STEPS = torch.tensor(0.05).double(), 30
CURVATURES = torch.tensor([0.2, 1.0, 3.0]).double()


def soap_run(leaf, gradient, every=soap.EVERY):
    moments, leaves = soap.start(gradient(leaf)), []
    for t in range(1, STEPS + 1):
        leaf, moments = soap.advance(leaf, gradient(leaf), moments, RATE, torch.tensor(float(t)).double())
        if t % every == 0:
            moments = soap.turned(moments)
        leaves.append(leaf)
    return torch.stack(leaves)


def adam_run(leaf, gradient):
    """torch's, with the same betas."""
    leaf, leaves = leaf.clone().requires_grad_(), []
    optimizer = torch.optim.Adam([leaf], lr=float(RATE), betas=soap.BETAS[:2], eps=1e-8)
    for _ in range(STEPS):
        leaf.grad = gradient(leaf.detach())
        optimizer.step()
        leaves.append(leaf.detach().clone())
    return torch.stack(leaves)


def quadratic(leaf):
    """The gradient of a sum of `c_i leaf_ii^2 / 2`; off the diagonal it is zero, so the factors are diagonal."""
    return torch.diag(CURVATURES * leaf.diagonal())


START = torch.diag(torch.tensor([1.0, -2.0, 1.5]).double())


def test_it_is_adam_for_a_vector_and_where_the_factors_are_diagonal():
    vector = torch.tensor([1.0, -2.0, 1.5]).double()
    for start, gradient in ((START, quadratic), (vector, lambda leaf: CURVATURES * leaf)):
        torch.testing.assert_close(soap_run(start, gradient), adam_run(start, gradient))


def test_in_rotated_coordinates_it_is_adam_in_the_eigenbasis():
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(3, 3, generator=generator).double()).Q for _ in range(2))
    rotated = lambda leaf: U @ quadratic(U.T @ leaf @ V) @ V.T
    found = soap_run(U @ START @ V.T, rotated)
    torch.testing.assert_close(U.T @ found @ V, adam_run(START, quadratic), rtol=1e-6, atol=1e-5)
    # Adam itself sees other coordinates.
    assert (adam_run(U @ START @ V.T, rotated) - found).abs().max() > 0.01


def test_the_bases_turn_towards_the_eigenvectors_of_the_factors():
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(4, 3, generator=generator).double() * torch.tensor([1.0, 3.0, 9.0]) for _ in range(2)]
    moments = soap.start(gradients[0])
    _, moments = soap.advance(torch.zeros(4, 3).double(), gradients[1], moments, RATE, torch.tensor(1.0).double())
    moments = moments._replace(factors=tuple(G @ G.T + torch.eye(len(G)) for G in (gradients[1], gradients[1].T)))
    for _ in range(200):
        moments = soap.turned(moments)
    for factor, basis in zip(moments.factors, moments.bases, strict=True):
        inside = basis.T @ factor @ basis
        torch.testing.assert_close(inside, torch.diag(torch.linalg.eigvalsh(factor).flip(0)), rtol=1e-6, atol=1e-6)


def test_what_is_kept_of_a_vector_stays_with_it_when_the_order_changes():
    left, right = torch.diag(torch.tensor([1.0, 9.0, 4.0])), torch.diag(torch.tensor([2.0, 3.0]))
    first, second = torch.arange(6.0).view(3, 2), 10 + torch.arange(6.0).view(3, 2)
    moments = soap.turned(soap.Moments(first, second, (left, right), (torch.eye(3), torch.eye(2))))
    rows, columns = (basis.abs().argmax(dim=0) for basis in moments.bases)
    assert rows.tolist() == [1, 2, 0]
    assert columns.tolist() == [1, 0]
    torch.testing.assert_close(moments.second, second[rows][:, columns])
    torch.testing.assert_close(moments.bases[0] @ moments.first @ moments.bases[1].T, first)
