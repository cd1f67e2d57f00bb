// SPDX-License-Identifier: Apache-2.0

package dataplanetest

type contractCase struct {
	name string
	run  func(*fixture)
}
