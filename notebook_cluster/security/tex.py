"""Which TeX may stand in what nodes show: commands that only write, none that names an address, a style or a file."""

import re

_COMMAND = re.compile(r"\\([A-Za-z]+)")
_COMMANDS = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi varpi rho varrho sigma
varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
frac dfrac tfrac binom sqrt sum prod int oint lim limsup liminf max min sup inf arg log ln exp sin cos tan cot sec csc
arcsin arccos arctan sinh cosh tanh det dim ker deg gcd Pr
cdot cdots ldots dots vdots ddots times div pm mp ast star circ bullet oplus otimes odot wedge vee cap cup setminus
leq geq le ge neq ne lt gt ll gg approx sim simeq cong equiv propto in notin ni subset supset subseteq supseteq mid
parallel perp forall exists nexists neg land lor emptyset varnothing infty partial nabla hbar ell Re Im aleph angle
to gets mapsto leftarrow rightarrow leftrightarrow Leftarrow Rightarrow Leftrightarrow longrightarrow longleftarrow
uparrow downarrow implies iff left right big Big bigg Bigg lfloor rfloor lceil rceil langle rangle lvert rvert lVert
rVert vert Vert hat bar tilde vec dot ddot widehat widetilde overline underline overbrace underbrace prime dagger
mathrm mathbf mathit mathsf mathtt mathcal mathbb mathfrak boldsymbol operatorname text textbf textit textrm mbox
quad qquad displaystyle textstyle limits nolimits begin end degree top bot
"""
_KNOWN = frozenset(_COMMANDS.split())


NO_TEX = "mathjax_ignore tex2jax_ignore"
"""Classes of HTML that MathJax leaves alone; else it reads all but what is in ``<pre>``, and its safe mode too lets a
style load a cursor from an address."""


def is_plain_tex(text: str) -> bool:
    """Every command in ``text`` is one that only writes; text without a backslash is plain too."""
    return all(name in _KNOWN for name in _COMMAND.findall(text))


def without_tex(text: str) -> str:
    """``text``, which looks the same, without commands where one is not among those that only write."""
    return text if is_plain_tex(text) else text.replace("\\", "\\\u200b")


def html_without_tex(safe: str) -> str:
    """``safe``, HTML that is cleaned already, as MathJax may read it."""
    return safe if is_plain_tex(safe) else f'<div class="{NO_TEX}">{safe}</div>'
