#compdef flannelctl
# SPDX-License-Identifier: Apache-2.0
# The script replaces this function by its own, which does nothing in an eval.
eval "$(flannelctl completion zsh)"
_flannelctl "$@"
