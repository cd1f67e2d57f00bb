// SPDX-License-Identifier: Apache-2.0

package cloud

import "testing"

func TestSecretKeys(t *testing.T) {
	got, err := SecretKeys([]byte(`{"Type":"a","AccessKeySecret":"b","accesskeyid":"c","SessionToken":"d","RouteTableID":["e"]}`))
	if err != nil || len(got) != 3 {
		t.Errorf("%d warnings, want 3: %q, error %v", len(got), got, err)
	}
}
