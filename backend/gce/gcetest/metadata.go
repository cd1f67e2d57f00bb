// SPDX-License-Identifier: Apache-2.0

package gcetest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// Token is the beginning of all tokens. Tests check that it is never shown.
const Token = "ya29.token-of-the-service-account-"

// Metadata returns the metadata service of an instance. Like the real one, it refuses requests
// without the header Metadata-Flavor, and requests that a proxy has forwarded.
func (s *Server) Metadata(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Metadata-Flavor", "Google")
		if r.Header.Get("Metadata-Flavor") != "Google" || r.Header.Get("X-Forwarded-For") != "" {
			http.Error(w, "Missing Metadata-Flavor:Google header.", http.StatusForbidden)
			return
		}

		s.mu.Lock()
		defer s.mu.Unlock()
		i := s.instances[name]
		values := map[string]string{
			"project/project-id":           Project,
			"project/numeric-project-id":   Number,
			"instance/name":                i.Name,
			"instance/zone":                "projects/" + Number + "/zones/" + Zone,
			"instance/network-interfaces/": i.interfaces(),
		}
		if i.Scopes != nil {
			values["instance/service-accounts/default/scopes"] = strings.Join(i.Scopes, "\n")
			values["instance/service-accounts/default/token"] = fmt.Sprintf(`{"access_token":%q,"expires_in":3599,"token_type":"Bearer"}`, s.bearer(name))
		}

		value, ok := values[strings.TrimPrefix(r.URL.Path, "/computeMetadata/v1/")]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(value))
	})
}

// bearer returns the valid token of an instance. If instance is empty, bearer returns the beginning of
// the valid tokens of all instances.
func (s *Server) bearer(instance string) string {
	return fmt.Sprintf("%s%d-%s", Token, s.token, instance)
}

// interfaces returns the network interface in the form of the metadata service. i.Network is the
// name of a VPC network. In another project, it is the number of the project, a slash and the name.
func (i Instance) interfaces() string {
	project, network, shared := strings.Cut(i.Network, "/")
	if !shared {
		project = Number
		network = i.Network
	}

	n := map[string]any{"network": "projects/" + project + "/networks/" + network, "mac": "42:01:0a:80:00:02", "mtu": 1460}
	var six []string
	for _, a := range i.Addresses {
		if a.Is4() {
			n["ip"] = a.String()
		} else {
			six = append(six, a.String())
		}
	}

	n["ipv6s"] = six
	text, _ := json.Marshal([]any{n}) //nolint:errchkjson // strings and numbers
	return string(text)
}
