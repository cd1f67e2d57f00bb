# SPDX-License-Identifier: Apache-2.0
eval "$(flannelctl completion bash)"
