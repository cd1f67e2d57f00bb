# SPDX-License-Identifier: Apache-2.0
flannelctl completion fish | source
