"""keynorm: the prompt tokens with the shortest keys, and every generated one (Devoto et al., arXiv 2406.11430)."""

from kv.parts.scored import Scored, ScoredMethod


class KeyNorm(Scored):
    def score(self, q, k, v):  # q [1,Hq,T,D], k and v [1,Hk,T,D]
        return -k[0].float().norm(dim=-1)  # [Hk,T]: the highest stay


class KeyNormMethod(ScoredMethod):
    name = "keynorm"
    paper = "https://arxiv.org/abs/2406.11430"
    help = "the shortest keys"
    layer = KeyNorm
