// SPDX-License-Identifier: Apache-2.0

package ec2test

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

const role = "flanneld"

// Metadata returns the metadata service of an instance. It refuses requests without a token.
func Metadata(i vpctest.Instance) http.Handler {
	return vpctest.Metadata("X-Aws-Ec2-Metadata-Token", map[string]string{
		"placement/region": vpctest.Region, "instance-id": i.ID, "services/domain": "amazonaws.com",
		"iam/security-credentials/{$}": role, "iam/security-credentials/" + role: string(Keys()),
	})
}

// Keys returns the keys of the role of every instance, in the form of the metadata service and of the agents that give
// containers a role.
func Keys() []byte {
	text, _ := json.Marshal(map[string]string{ //nolint:errchkjson // strings
		"Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": vpctest.KeyID, "SecretAccessKey": vpctest.Secret, "Token": vpctest.Token,
		"Expiration": time.Now().Add(6 * time.Hour).UTC().Format(time.RFC3339),
	})
	return text
}
